"""report.html: what a run did, on one page that opens offline.

page              the page, from the files of a run folder
run_data, series  the rows of a run, as the page reads them
chart_list        the charts of metrics
charts, axes      charts as SVG
completion_pages  completions with the numbers of their tokens
explorer          any metric over any axis
pictures          pictures of samples, with the coordinates of answers
several           several runs on one page
notebook          pages and charts in a notebook
html_page         pages from templates/, in which every text is escaped
"""

from tpu_rl.report.notebook import charts_of, page_of
from tpu_rl.report.page import FILE, build_page, write_failure, write_report
from tpu_rl.report.run_data import GUIDED_FILE
from tpu_rl.report.several import build_comparison
