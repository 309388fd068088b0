"""Checks to run against anyone's inference engine: what it returns, and whether it is true.

pytest --trueup-engine http://127.0.0.1:8000 --trueup-model DIR
"""
