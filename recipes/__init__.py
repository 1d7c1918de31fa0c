"""Tasks to train on: each recipe is a folder with its data, its reward and its README; its settings are in conf/recipe."""
