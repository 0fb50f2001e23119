"""Several hosts, played by network namespaces."""
