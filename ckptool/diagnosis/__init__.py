"""Why a file does not load: checks find complaints, and one conversion fixes them."""

from ckptool.diagnosis.complaint import Complaint as Complaint
from ckptool.diagnosis.diagnose import Diagnosis as Diagnosis, doctor as doctor
