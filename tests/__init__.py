"""Tests of evenstep. Functions that run on ranks are at the top level of these modules, so that ranks can import them."""
