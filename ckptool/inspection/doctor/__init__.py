"""Why a file does not load, and the commands that mend it: one module a group of complaints."""

from ckptool.inspection.doctor.complaint import Complaint
from ckptool.inspection.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Complaint", "Diagnosis", "diagnose"]
