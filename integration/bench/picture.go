// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
)

// Sizes of the picture in pixels, close to the width of a phone.
const (
	pictureWidth = 400
	barRoom      = 230 // of the longest bar; the rest is for its text
	barHeight    = 15
	groupSpace   = 12
)

// pictureStyle also works on a dark page.
const pictureStyle = `<style>text { font: 12px sans-serif; fill: #24292f } .podlace-pod { fill: #1f6feb } .ours { fill: #79b8ff }
.reference { fill: #afb8c1 } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .reference { fill: #6e7681 } }</style>`

// picture returns an SVG image with the medians of ADD and DEL of each pod of the shipped configuration, as bars of one scale.
func (r *report) picture() string {
	var rows []chainRow
	longest := 0.0
	for _, row := range r.Chains {
		if _, shipped := row.Sides[sidePod]; !shipped || row.Verb == verbCheck {
			continue
		}
		rows = append(rows, row)
		for _, v := range row.Sides {
			longest = max(longest, v.P50)
		}
	}
	var bars strings.Builder
	y := 0
	for _, row := range rows {
		fmt.Fprintf(&bars, "<text x=\"0\" y=\"%d\" style=\"font-weight: bold\">%s of a pod: %s</text>\n", y+barHeight-3, row.Verb, row.Chain)
		y += barHeight + 3
		for _, side := range []struct{ class, name string }{{sidePod, sidePod}, {sideOurs, "chain"}, {sideReference, "reference plugins"}} {
			width := barRoom * row.Sides[side.class].P50 / longest
			fmt.Fprintf(&bars, "<rect class=\"%s\" y=\"%d\" width=\"%.1f\" height=\"%d\"/><text x=\"%.1f\" y=\"%d\">%.0f ms, %s</text>\n",
				side.class, y, width, barHeight-2, width+5, y+barHeight-3, row.Sides[side.class].P50, side.name)
			y += barHeight
		}
		y += groupSpace
	}
	y -= groupSpace
	const frame = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" role="img">` + "\n<title>Medians of ADD and DEL, shorter is better</title>\n%s\n%s</svg>\n"
	return fmt.Sprintf(frame, pictureWidth, y, pictureStyle, bars.String())
}
