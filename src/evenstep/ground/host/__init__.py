"""This machine.

- `network`: ports and addresses.
- `temporary`: directories that end with their process.
- `processes`: information on processes from `/proc`.
- `control_groups`: limits of memory and of cores.
- `named_files`: files that a person names.
"""
