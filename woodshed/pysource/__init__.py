"""Python source as text and as trees."""
