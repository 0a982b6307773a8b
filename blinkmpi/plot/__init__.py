"""Pictures of machines and trees."""
