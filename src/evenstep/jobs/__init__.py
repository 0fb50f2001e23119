"""Job scripts for schedulers: Slurm, PBS and Kubernetes. `scripts` is pure: a `Job` in, text out."""
