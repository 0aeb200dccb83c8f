"""What a run tells about itself: metric names, the metrics file, observers."""
