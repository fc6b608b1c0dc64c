"""Everything that touches MLflow. Importing this package does not import MLflow (that costs seconds); using a Tracker does.

A run is written down twice: as a RunRecord in its run folder (the journal, always there) and in the tracking store. What did
not reach the store is uploaded from the journal later (`crosstrain sync`).
"""

from crosstrain.tracking.identity import driver_identity, is_alive
from crosstrain.tracking.series import RunRecord, Series
from crosstrain.tracking.store import TrackedRun, Tracker

__all__ = ["RunRecord", "Series", "TrackedRun", "Tracker", "driver_identity", "is_alive"]
