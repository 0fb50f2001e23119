"""The real launchers: Open MPI, MPICH and a one-node Slurm. `make test-launchers` installs and runs them."""
