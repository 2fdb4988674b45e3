"""A plan as one HTML page that fetches nothing."""
