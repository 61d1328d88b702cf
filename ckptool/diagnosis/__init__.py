"""Why a file does not load, and the command that mends it: checks find, one conversion mends."""

from ckptool.diagnosis.complaint import Complaint as Complaint
from ckptool.diagnosis.diagnose import Diagnosis as Diagnosis, doctor as doctor
