#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# plot-limits.sh [-rounds N]: measures what burst and latency of the bandwidth plugin are good for and draws docs/limits.svg.
# The tables stay in build/limits. It needs gnuplot and an idle machine, and touches no network.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v gnuplot >/dev/null || { echo "$0: gnuplot is missing (Debian: gnuplot-nox)" >&2; exit 1; }
make build reference
go run -buildvcs=false ./integration/plot -plugins bin -reference build/reference -out build/limits "$@"

drawn=$(mktemp)
trap 'rm -f "$drawn"' EXIT
gnuplot >"$drawn" <<'GNUPLOT'
load 'build/limits/facts.gp'
# White, so that it can be read on a dark page too.
set terminal svg size 1000,480 background rgb 'white' font 'sans-serif,12' noenhanced
set multiplot layout 1,2
set border 3
set style line 1 linecolor rgb '#0072b2' linewidth 2 pointtype 7 pointsize 0.5
set style line 2 linecolor rgb '#009e73' linewidth 2 pointtype 7 pointsize 0.5
set style line 3 linecolor rgb '#000000' linewidth 2 pointtype 7 pointsize 0.5
set style line 4 linecolor rgb '#d55e00' linewidth 2 pointtype 7 pointsize 0.5
set style line 5 linecolor rgb '#777777' linewidth 1 dashtype 2
set bmargin 10
set lmargin 9
bursts = 'build/limits/bursts.dat'
waits = 'build/limits/latency.dat'
stats bursts using (column(curves + 1)) skip 1 nooutput

set title 'One TCP flow into a pod with 20 Mbit/s, by burst'
set xlabel 'time since the first byte (s)'
set ylabel 'received (Mbit)'
set xrange [-0.05:2]
set yrange [0:80]
set xtics nomirror 0, 0.5, 2
set ytics nomirror 0, 20, 80
set key at screen 0.05,0.23 left top Left reverse
if (STATS_max > 80) set label 1 sprintf('up to %.0f Mbit', STATS_max) at 0.05,77
plot for [i=1:curves] bursts using 1:(column(i + 1)) with lines linestyle i title columnheader(i + 1)
unset label 1

set key at screen 0.54,0.23
set title 'Small datagrams behind 8 greedy TCP flows, 20 Mbit/s'
set xlabel sprintf('latency in the configuration (ms); %s', queue)
set ylabel 'round trip (ms)'
set y2label 'percent'
set border 11
set logscale xy
unset mxtics
unset mytics
set xrange [1.7:120]
set yrange [1:1000]
set y2range [0:105]
set xtics nomirror (2, 5, 10, 20, 50, 100)
set ytics nomirror (1, 10, 100, 1000)
set y2tics 0, 25, 100
plot waits using 1:3 with linespoints linestyle 4 title 'round trip, 95th percentile (ms)', \
  waits using 1:2 with linespoints linestyle 1 title 'round trip, median (ms)', \
  x with lines linestyle 5 title 'latency itself (ms)', \
  waits using 1:4 axes x1y2 with linespoints linestyle 3 title 'lost (%)', \
  waits using 1:5 axes x1y2 with linespoints linestyle 2 title 'part of the rate that a TCP flow alone uses (%)'
GNUPLOT
sed -z 's#<g [^>]*>\n</g>\n##g' "$drawn" >docs/limits.svg # a third of it are empty groups
