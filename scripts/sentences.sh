#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Draws 60 sentences from the documents and from the comments of Go code with a fixed seed, and prints a table: file and line, an empty mark,
# sentence, and the sentence before it in the same paragraph, which a reader of the file has just read. A reader marks a sentence with 1 if it
# is clear, with 2 if it needs a second reading, and with u if it is clear but unnatural. integration/docs/testdata/sentences.tsv is the last
# list with the marks of two independent readers: file and line, mark, mark, sentence, sentence before it.
# Usage: scripts/sentences.sh [SEED [COUNT]]
set -eu
cd "$(dirname "$0")/.."
seed=${1:-20261129} count=${2:-60}

# text prints the prose of a file as "file:line<TAB>text", one paragraph, list item, table cell or comment in each line.
text() {
	awk '
		function flush() { if (block != "") print place "\t" block; block = "" }
		function add(s) { if (block == "") { place = FILENAME ":" FNR; block = s } else block = block " " s }
		FNR == 1 { flush(); fence = 0; go = FILENAME ~ /\.go$/ }
		go && /^[ \t]*\/\/ / && !/SPDX|nolint/ { sub(/^[ \t]*\/\/ /, ""); add($0); next }
		go { flush(); next }
		/^```/ { fence = !fence; flush(); next }
		fence || /^#/ || /^!\[/ || /^\| ---/ { flush(); next }
		/^\|/ { flush(); n = split($0, cell, / *\| */); for (i = 2; i < n; i++) { add(cell[i]); flush() } next }
		/^(- |[0-9]+\. )/ { flush(); sub(/^(- |[0-9]+\. )/, ""); add($0); next }
		NF { sub(/^ +/, ""); add($0); next }
		{ flush() }
		END { flush() }' "$@"
}

# sentences splits each text into sentences, and keeps the sentences of at least five words.
sentences() {
	awk -F '\t' '{ text = $2; before = ""
		while (match(text, /[.!?] +([A-Z`\[]|[a-z]+[A-Z(])/)) {
			emit(substr(text, 1, RSTART)); text = substr(text, RSTART + 1); sub(/^ +/, "", text) }
		emit(text) }
		function emit(s) { if (split(s, words, / +/) >= 5) print $1 "\t\t" s "\t" before; before = s }'
}

text $(git ls-files -- '*.md' '*.go' | grep -v testdata/ | LC_ALL=C sort) | sentences |
	LC_ALL=C awk -v seed="$seed" -v count="$count" '
		{ line[NR] = $0 }
		function random() { state = (state * 16807) % 2147483647; return state }
		END { state = seed; random(); random()
			for (i = 1; i <= count && i <= NR; i++) {
				j = i + random() % (NR - i + 1)
				other = line[i]; line[i] = line[j]; line[j] = other
				print line[i]
			} }'
