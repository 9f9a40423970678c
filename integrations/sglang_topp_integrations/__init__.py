"""Adapters for training frameworks, one module each.

An adapter scores the policy over the candidate sets that SGLang returned for a rollout (replay). Import the
module of your framework.
"""
