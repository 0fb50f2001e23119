"""What training writes down about itself: `Logger`, and the files that it writes."""
