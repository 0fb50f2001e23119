"""This machine.

- `network`: ports and addresses.
- `temporary`: directories that end with their process.
- `processes`: what `/proc` says of processes.
- `control_groups`: limits of memory and of cores.
- `named_files`: files that a person names.
"""
