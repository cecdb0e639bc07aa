# SPDX-License-Identifier: Apache-2.0
"""Configs: conversion of dataclasses to YAML and back, typed overrides, and the origin of each value."""
