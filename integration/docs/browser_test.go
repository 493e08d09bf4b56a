// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

// browserProbe is a script that measures a page in the browser and stores the results in attributes of the html element. The script
// measures the width of the page. The script also lists pictures that did not load, and elements that are too wide and have no scroll bar.
const browserProbe = `<script>addEventListener("load", () => {
  const d = document.documentElement, scrolls = e => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  d.dataset.width = d.scrollWidth;
  d.dataset.wide = [...document.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e))
    .slice(0, 3).map(e => e.tagName + " " + e.textContent.slice(0, 40)).join("; ");
  d.dataset.broken = [...document.images].filter(i => !i.naturalWidth).map(i => i.src).join(" ");
  d.dataset.pictures = document.images.length;
})</script></body>`

// TestSiteInBrowser opens each page with the window width of a phone and of a desktop. No page may be wider than the window, and all
// pictures must load.
func TestSiteInBrowser(t *testing.T) {
	dir, browser := siteFolder(t), os.Getenv("CHROMIUM")
	if browser == "" {
		t.Skip("SKIPPED: CHROMIUM is not set: run 'make site-check'")
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(r.URL.Path)))
		if err != nil {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", map[string]string{".css": "text/css", ".svg": "image/svg+xml"}[filepath.Ext(r.URL.Path)])
		if filepath.Ext(r.URL.Path) == ".html" {
			w.Header().Set("Content-Type", "text/html")
			data = bytes.Replace(data, []byte("</body>"), []byte(browserProbe), 1)
		}
		_, _ = w.Write(data)
	}))
	defer server.Close()
	for _, name := range slices.Sorted(maps.Keys(sitePages(t, dir))) {
		for _, width := range []int{390, 1280} {
			t.Run(fmt.Sprintf("%s at %d", name, width), func(t *testing.T) {
				found := loadInBrowser(t, browser, server.URL+"/"+name, width)
				if got, err := strconv.Atoi(found["data-width"]); err != nil || got > width || found["data-wide"] != "" {
					t.Errorf("the page is %q pixels wide: %q", found["data-width"], found["data-wide"])
				}
				if found["data-broken"] != "" {
					t.Errorf("pictures that do not load: %s", found["data-broken"])
				}
			})
		}
	}
}

// loadInBrowser loads a page in a headless Chromium and returns the attributes of the page's html element.
func loadInBrowser(t *testing.T, browser, url string, width int) map[string]string {
	t.Helper()
	out, err := exec.Command(browser, "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--user-data-dir="+t.TempDir(),
		fmt.Sprintf("--window-size=%d,844", width), "--dump-dom", url).Output()
	if err != nil {
		t.Fatalf("%s %s: %v", browser, url, err)
	}
	root, err := html.Parse(strings.NewReader(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for n := root.FirstChild; n != nil; n = n.NextSibling {
		for _, a := range n.Attr {
			found[a.Key] = a.Val
		}
	}
	return found
}
