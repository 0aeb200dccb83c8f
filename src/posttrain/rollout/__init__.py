"""Episodes: exact token records, running groups, and the bound on staleness."""
