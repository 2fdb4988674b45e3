"""What a served model's users will get: time of a step, room for keys and values, latencies under load."""
