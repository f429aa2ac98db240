"""Errors of the gradient engine. Each names the module, sample or step, and says what to do.

AttributionError             2
├─ SampleIdentityError       a row of a batch cannot be tied to one sample
├─ CoverageGapError          trainable parameters that no formula covers
├─ UnsupportedSetupError     a way of training that cannot be recorded faithfully
├─ CaptureError              a gradient did not arrive where it should
│  └─ SelfCheckError         the check before the first step found a difference
├─ RankError                 another process of the run failed
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


class SelfCheckError(CaptureError):
    """Before the first step, what would be recorded was not what autograd says."""


class UnsupportedSetupError(AttributionError):
    """This way of training cannot be recorded faithfully, so it is refused before the first step."""


class RankError(AttributionError):
    """Another process of the same run failed or is gone, so this one cannot go on."""


class SketchMismatchError(AttributionError):
    """Two sketches, or a sketch and a model, do not belong to the same linear map."""


class RecipeError(AttributionError):
    """The recipe function is missing, cannot be loaded, or does not return a ``Recipe``."""
