"""Scenarios: a few lines of text that say what happens, their full trace, and how a failing seed shrinks to one."""
