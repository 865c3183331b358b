"""What this machine can do, measured rather than assumed: each finding says what it means and, where bad, the fix."""
