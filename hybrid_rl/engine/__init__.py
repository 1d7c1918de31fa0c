"""Inference engines behind one protocol (`base.Engine`); every engine passes the same contract tests."""
