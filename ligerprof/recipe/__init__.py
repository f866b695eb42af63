"""What is trained and how: the recipe, DeepSpeed's settings, and the flags that spell it."""

# the recipe in a run directory
RECIPE_NAME = "recipe.json"
