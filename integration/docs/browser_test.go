// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

// probeScript runs in a page that has a frame for each page of the site and each width. Once all are loaded, it stores in an attribute of
// the html element: the width of each page, pictures that did not load, elements that are too wide and have no scroll bar, and the links
// that a search has found.
const probeScript = `<script>addEventListener("load", () => {
  document.documentElement.dataset.measured = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const d = frame.contentDocument, style = frame.contentWindow.getComputedStyle;
    const scrolls = e => e && (/auto|scroll/.test(style(e).overflowX) || scrolls(e.parentElement));
    return {
      width: d.documentElement.scrollWidth,
      wide: [...d.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > frame.width + 1 && !scrolls(e))
        .slice(0, 3).map(e => e.tagName + " " + e.textContent.slice(0, 40)),
      broken: [...d.images].filter(i => !i.naturalWidth).map(i => i.src),
      found: [...d.querySelectorAll("#found a")].map(a => a.getAttribute("href")),
    };
  }));
})</script>`

type measuredPage struct {
	Width               int
	Wide, Broken, Found []string
}

// TestSiteInBrowser opens each page as wide as a phone, a tablet and a desktop. None may be wider than its window, all pictures must load,
// and a search must find a heading.
func TestSiteInBrowser(t *testing.T) {
	dir, browser := siteFolder(t), os.Getenv("CHROMIUM")
	if browser == "" {
		t.Skip("SKIPPED: CHROMIUM is not set: run 'make site-check'")
	}
	type window struct {
		page  string
		width int
	}
	const asked, want = "docs/README.html?q=supported+kernels", "../docs/INSTALL.html#supported-kernels"
	windows := []window{{asked, 390}}
	for name := range sitePages(t, dir) {
		windows = append(windows, window{name, 390}, window{name, 768}, window{name, 1440})
	}
	var frames strings.Builder
	for _, w := range windows {
		fmt.Fprintf(&frames, "<iframe src=\"/%s\" width=\"%d\" height=\"844\" style=\"border: 0\"></iframe>\n", w.page, w.width)
	}
	measured := loadInBrowser(t, browser, dir, frames.String())
	if len(measured) != len(windows) {
		t.Fatalf("%d of %d pages were measured", len(measured), len(windows))
	}
	for i, w := range windows {
		if m := measured[i]; m.Width > w.width || len(m.Wide)+len(m.Broken) > 0 {
			t.Errorf("%s is %d pixels wide in a window of %d: too wide: %q; pictures that do not load: %q", w.page, m.Width, w.width, m.Wide, m.Broken)
		}
	}
	if !slices.Contains(measured[0].Found, want) {
		t.Errorf("%s finds %q: want %s", asked, measured[0].Found, want)
	}
}

// loadInBrowser serves the site and a page with the frames, and returns what headless Chromium measures in each.
func loadInBrowser(t *testing.T, browser, dir, frames string) (measured []measuredPage) {
	t.Helper()
	site := http.NewServeMux()
	site.Handle("/", http.FileServer(http.Dir(dir)))
	site.HandleFunc("/probe", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<!DOCTYPE html><html><body>", frames, probeScript, "</body></html>")
	})
	server := httptest.NewServer(site)
	defer server.Close()
	out, err := exec.Command(browser, "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--user-data-dir="+t.TempDir(), "--dump-dom",
		server.URL+"/probe").Output()
	if err != nil {
		t.Fatalf("%s: %v", browser, err)
	}
	root, err := html.Parse(strings.NewReader(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	for n := root.FirstChild; n != nil; n = n.NextSibling {
		for _, a := range n.Attr {
			if a.Key == "data-measured" {
				if err := json.Unmarshal([]byte(a.Val), &measured); err != nil {
					t.Fatalf("%v in %s", err, a.Val)
				}
			}
		}
	}
	return measured
}
