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

// The following constants are lengths in the SVG, in pixels. The font of the SVG is monospaced, so the width of a text follows from its
// number of characters.
const (
	svgMargin  = 16
	svgIndent  = 24
	svgRow     = 24
	svgBox     = 18 // height of a box in a row
	svgPadding = 6  // between a box and its text
	svgGap     = 14 // between columns
	svgBreak   = 10 // between branches
	svgFont    = 11
	// svgMostRunes is the maximum number of characters that the SVG shows of one text. A longer text is cut off, and the tooltip contains the
	// whole text.
	svgMostRunes = 60
)

// The following constants are the colours of the SVG. For the dark colour scheme of the documentation, docs/dark.css replaces these
// colours.
const (
	svgWhite  = "white"
	svgFrame  = "#eef5fc"
	svgHead   = "#dcebfa"
	svgFaulty = "#fbe9e7"
)

func svgTextWidth(text string) int { return (utf8.RuneCountInString(text)*svgFont*61 + 99) / 100 }

// svgPicture collects the elements of an SVG. The header of the SVG is written last, because the size of the SVG is known only after all
// elements have been added.
type svgPicture struct {
	body     bytes.Buffer
	y, right int
}

// svg() draws the topology as an SVG.
func (t topology) svg() []byte {
	p := &svgPicture{y: svgMargin}
	p.drawText(svgMargin, "node "+plain(t.Node), "bold")
	p.y += svgRow + svgBreak
	p.branches(svgMargin, t.branches())
	width, height := p.right+svgMargin, p.y+svgMargin-svgBreak
	style, _ := fs.ReadFile(podlace.Documents, "docs/dark.css") // embedded, so there is no error
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d"
 font-family="monospace" font-size="%d">
<title>%s</title>
%s<rect width="%d" height="%d" fill="%s"/>
`, width, height, width, height, svgFont, escapeXML("Pod network of node "+plain(t.Node)), style, width, height, svgWhite)
	out.Write(p.body.Bytes())
	out.WriteString("</svg>\n")
	return out.Bytes()
}

func (p *svgPicture) branches(x int, list []branch) {
	for _, b := range list {
		p.rect(x, svgTextWidth(b.heading)+2*svgPadding, svgHead)
		p.drawText(x+svgPadding, b.heading, "bold")
		top := p.y + svgBox
		p.y += svgRow
		p.drawRows(x+svgIndent, top, b.rows)
		p.branches(x+svgIndent, b.below)
		if len(b.below) == 0 {
			p.y += svgBreak
		}
	}
}

// drawRows draws the interface and the pod of each row. In the SVG, a vertical line connects the rows. The argument `top` is the y
// coordinate at which the vertical line begins.
func (p *svgPicture) drawRows(x, top int, rows []row) {
	widths := columnWidths(rows)
	for _, r := range rows {
		trunk, middle := x-svgIndent/2, p.y+svgBox/2
		p.line(trunk, top, trunk, middle)
		p.line(trunk, middle, x, middle)
		p.drawRow(x, widths, r)
		top = middle
		p.y += svgRow
	}
}

// drawRow draws the interface and the pod as boxes, and the other data as text.
func (p *svgPicture) drawRow(x int, widths []int, r row) {
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
			p.drawText(x+svgPadding, cell, "")
			x += 2 * svgPadding
		} else {
			p.drawText(x, cell, "")
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

// drawText draws a text. drawText cuts off a long text and adds a tooltip with the whole text.
func (p *svgPicture) drawText(x int, text, weight string) {
	if text == "" {
		return
	}
	tooltip, attributes := "", ""
	if weight != "" {
		attributes = ` font-weight="` + weight + `"`
	} else if utf8.RuneCountInString(text) > svgMostRunes {
		tooltip = "<title>" + escapeXML(text) + "</title>"
		text = string([]rune(text)[:svgMostRunes-3]) + "..."
	}
	fmt.Fprintf(&p.body, `<text x="%d" y="%d"%s>%s%s</text>`+"\n", x, p.y+svgBox-svgPadding+1, attributes, tooltip, escapeXML(text))
	p.right = max(p.right, x+svgTextWidth(text))
}

// escapeXML escapes the characters that have a meaning in XML.
func escapeXML(text string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(text)) // a buffer returns no error
	return b.String()
}
