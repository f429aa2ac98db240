"""Errors of the gradient engine. Each names the module, sample or step, and says what to do.

AttributionError             2
├─ SampleIdentityError       a row of a batch cannot be tied to one sample
├─ CoverageGapError          trainable parameters that no formula covers
├─ CaptureError              a gradient did not arrive where it should
├─ SketchMismatchError       two sketches were not made by the same map
└─ RecipeError               the function that rebuilds model and data
"""

from __future__ import annotations

from auditlog.errors import Error


class AttributionError(Error):
    """Root of the gradient engine's errors."""


class SampleIdentityError(AttributionError):
    """A row of a batch cannot be tied to exactly one sample of the data manifest."""


class CoverageGapError(AttributionError):
    """Some trainable parameters are not tracked, and nobody said that this is all right."""


class CaptureError(AttributionError):
    """A gradient or activation did not arrive in the shape or at the time that the formulas need."""


class SketchMismatchError(AttributionError):
    """Two sketches, or a sketch and a model, do not belong to the same linear map."""


class RecipeError(AttributionError):
    """The recipe function is missing, cannot be loaded, or does not return a ``Recipe``."""
