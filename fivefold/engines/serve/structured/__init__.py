"""Answers of a given form: JSON of a schema, a regular expression, one of several, a grammar."""
