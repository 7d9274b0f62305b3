"""report.html: what a run did, on one page that opens offline.

page              the page, from the files of a run folder; the learning curve as a PNG
run_data, series  the rows of a run, as the page reads them
chart_list        the charts of metrics
charts, axes      charts as SVG
completion_pages  completions with the numbers of their tokens
explorer          any metric over any axis, and tables that are sorted
pictures          pictures of samples, with the coordinates of answers
several           several runs on one page
notebook          pages and charts in a notebook
html_page         the frame of the page
plots             PNG files
"""

from tpu_rl.report.notebook import charts_of as charts_of
from tpu_rl.report.notebook import page_of as page_of
from tpu_rl.report.page import FILE as FILE
from tpu_rl.report.page import build_page as build_page
from tpu_rl.report.page import plot_learning_curve as plot_learning_curve
from tpu_rl.report.page import write_failure as write_failure
from tpu_rl.report.page import write_report as write_report
from tpu_rl.report.run_data import GUIDED_FILE as GUIDED_FILE
from tpu_rl.report.several import build_comparison as build_comparison
