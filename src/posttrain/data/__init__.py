"""From tasks to draws, and from scored groups to packed training batches."""
