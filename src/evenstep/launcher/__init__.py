"""Starting ranks: from a function (`launch`), and from the command line on torchelastic (`run`)."""
