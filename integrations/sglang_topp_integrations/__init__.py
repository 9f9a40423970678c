"""Adapters that add replay to training frameworks, one module each. Import the module of your framework."""
