"""Run studies: cells on disk, rates chosen apart, contrasts with intervals, figures and reports."""
