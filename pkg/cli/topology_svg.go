// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io/fs"
	"strings"
	"unicode/utf8"

	"github.com/podlace/podlace"
)

// Measures of the SVG in pixels. Text is monospaced, so the number of characters gives its width.
const (
	svgMargin  = 16
	svgIndent  = 24
	svgRow     = 24
	svgBox     = 18 // height of a box in a row
	svgPadding = 6  // between a box and its text
	svgGap     = 14 // between columns
	svgBreak   = 10 // between branches
	svgFont    = 11
	// svgMostRunes is the longest text of a cell. A longer text is truncated; the tooltip has all of it.
	svgMostRunes = 60
)

// Colours, which docs/dark.css replaces in the dark scheme.
const (
	svgWhite  = "white"
	svgFrame  = "#eef5fc"
	svgHead   = "#dcebfa"
	svgFaulty = "#fbe9e7"
)

func svgTextWidth(text string) int { return (utf8.RuneCountInString(text)*svgFont*61 + 99) / 100 }

// svgPicture is an SVG in the making. Its size is known only at the end.
type svgPicture struct {
	body     bytes.Buffer
	y, right int
}

// svg draws the picture as an SVG.
func (t topology) svg() []byte {
	p := &svgPicture{y: svgMargin}
	p.text(svgMargin, "node "+plain(t.Node), "bold")
	p.y += svgRow + svgBreak
	p.branches(svgMargin, t.branches())
	width, height := p.right+svgMargin, p.y+svgMargin-svgBreak
	style, _ := fs.ReadFile(podlace.Documents, "docs/dark.css") // embedded, so there is no error
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d"
 font-family="monospace" font-size="%d">
<title>%s</title>
%s<rect width="%d" height="%d" fill="%s"/>
`, width, height, width, height, svgFont, escaped("Pod network of node "+plain(t.Node)), style, width, height, svgWhite)
	out.Write(p.body.Bytes())
	out.WriteString("</svg>\n")
	return out.Bytes()
}

func (p *svgPicture) branches(x int, list []branch) {
	for _, b := range list {
		p.rect(x, svgTextWidth(b.heading)+2*svgPadding, svgHead)
		p.text(x+svgPadding, b.heading, "bold")
		top := p.y + svgBox
		p.y += svgRow
		p.rows(x+svgIndent, top, b.rows)
		p.branches(x+svgIndent, b.below)
		if len(b.below) == 0 {
			p.y += svgBreak
		}
	}
}

// rows draws a line for each row, joined by a trunk that begins at the height top.
func (p *svgPicture) rows(x, top int, rows []row) {
	widths := columnWidths(rows)
	for _, r := range rows {
		trunk, middle := x-svgIndent/2, p.y+svgBox/2
		p.line(trunk, top, trunk, middle)
		p.line(trunk, middle, x, middle)
		p.row(x, widths, r)
		top = middle
		p.y += svgRow
	}
}

// row draws the interface and the pod as boxes, and the facts as text.
func (p *svgPicture) row(x int, widths []int, r row) {
	fill := svgFrame
	if r.trouble != "" {
		fill = svgFaulty
	}
	for c, cell := range r.cells() {
		width := svgTextWidth(strings.Repeat("x", min(widths[c], svgMostRunes)))
		switch {
		case widths[c] == 0:
			continue
		case c == 0:
			p.line(x+width+2*svgPadding, p.y+svgBox/2, x+width+2*svgPadding+svgGap, p.y+svgBox/2)
			p.rect(x, width+2*svgPadding, svgWhite)
		case c == 1:
			p.rect(x, width+2*svgPadding, fill)
		}
		if c < 2 {
			p.text(x+svgPadding, cell, "")
			x += 2 * svgPadding
		} else {
			p.text(x, cell, "")
		}
		x += width + svgGap
	}
}

func (p *svgPicture) rect(x, width int, fill string) {
	fmt.Fprintf(&p.body, `<rect x="%d" y="%d" width="%d" height="%d" rx="3" fill="%s" stroke="black" stroke-width="0.5"/>`+"\n",
		x, p.y, width, svgBox, fill)
	p.right = max(p.right, x+width)
}

func (p *svgPicture) line(x1, y1, x2, y2 int) {
	fmt.Fprintf(&p.body, `<path d="M%d %dL%d %d" stroke="black" stroke-width="0.5"/>`+"\n", x1, y1, x2, y2)
}

// text draws a text. The length of a long text is limited; the tooltip then has the whole text.
func (p *svgPicture) text(x int, text, weight string) {
	if text == "" {
		return
	}
	tooltip, attributes := "", ""
	if weight != "" {
		attributes = ` font-weight="` + weight + `"`
	} else if utf8.RuneCountInString(text) > svgMostRunes {
		tooltip = "<title>" + escaped(text) + "</title>"
		text = string([]rune(text)[:svgMostRunes-3]) + "..."
	}
	fmt.Fprintf(&p.body, `<text x="%d" y="%d"%s>%s%s</text>`+"\n", x, p.y+svgBox-svgPadding+1, attributes, tooltip, escaped(text))
	p.right = max(p.right, x+svgTextWidth(text))
}

// escaped escapes the characters with a meaning in XML.
func escaped(text string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(text)) // a buffer returns no error
	return b.String()
}
