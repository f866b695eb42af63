"""Recipes from the configuration files of other programs: one module per framework, tables of keys, one resolver."""
