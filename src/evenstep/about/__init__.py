"""What there is to know of this host before training: `evenstep env`, and the check of `evenstep run --check`."""
