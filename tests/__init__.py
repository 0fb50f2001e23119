"""Tests of evenstep. Functions that run on ranks stand at the top level of modules: ranks import them."""
