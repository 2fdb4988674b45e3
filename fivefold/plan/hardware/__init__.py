"""What a plan runs on: devices, the links between them, and how much of either is reached."""
