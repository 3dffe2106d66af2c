"""Draw a report as one HTML file."""
