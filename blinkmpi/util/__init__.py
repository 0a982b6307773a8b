"""What every room uses: JSON with exact fractions, settings from the environment, the user's cache folder."""
