"""What requests may contain: one strict model for each kind."""
