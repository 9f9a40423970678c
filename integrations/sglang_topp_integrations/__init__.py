"""Adapters for training frameworks, one module each. Import the module of your framework."""
