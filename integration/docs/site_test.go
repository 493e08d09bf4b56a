// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

// sourceURL is the prefix of links to files without a page on the site.
const sourceURL = "https://github.com/podlace/podlace/blob/main/"

// sitePage has the links, pictures and link targets of one page.
type sitePage struct {
	links, pictures []string
	menu            []string // links of the navigation
	ids             map[string]bool
	title           string
	viewport        bool // without it phones show the page as on a desk, but smaller
}

// siteFolder returns the folder that `make site` wrote, or skips the test.
func siteFolder(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("SITE")
	if dir == "" {
		t.Skip("SKIPPED: SITE is not set: run 'make site'")
	}
	return dir
}

// sitePages parses the site's pages by their path in its folder.
func sitePages(t *testing.T, dir string) map[string]*sitePage {
	t.Helper()
	pages := map[string]*sitePage{}
	err := filepath.WalkDir(dir, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(file) != ".html" {
			return err
		}
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		root, err := html.Parse(f)
		name, _ := filepath.Rel(dir, file)
		pages[name] = &sitePage{ids: map[string]bool{}}
		pages[name].collectTargets(root, false)
		return err
	})
	if err != nil || len(pages) == 0 {
		t.Fatalf("%s: %d pages, %v", dir, len(pages), err)
	}
	return pages
}

// collectTargets collects the links, pictures and link targets of an element and those inside it.
func (p *sitePage) collectTargets(n *html.Node, inMenu bool) {
	attributes := map[string]string{}
	for _, a := range n.Attr {
		attributes[a.Key] = a.Val
	}
	if id := attributes["id"]; id != "" {
		p.ids[id] = true
	}
	switch n.Data {
	case "a":
		p.links = append(p.links, attributes["href"])
		if inMenu {
			p.menu = append(p.menu, attributes["href"])
		}
	case "img":
		p.pictures = append(p.pictures, attributes["src"])
	case "meta":
		p.viewport = p.viewport || attributes["name"] == "viewport"
	case "title":
		if n.FirstChild != nil {
			p.title = n.FirstChild.Data
		}
	}
	for c := n.FirstChild; c != nil; c = c.NextSibling {
		p.collectTargets(c, inMenu || n.Data == "nav")
	}
}

// Each document has a page, and each page's menu links to all pages. The targets of all links and pictures exist.
func TestSite(t *testing.T) {
	dir := siteFolder(t)
	pages := sitePages(t, dir)
	for _, d := range documents(t) {
		if name := pageOf(d.path); !strings.HasPrefix(name, "integration/") && pages[name] == nil {
			t.Errorf("%s has no page on the site: add it to pages and mounts in docs/site/hugo.toml", d.path)
		}
	}
	for name, p := range pages {
		if !p.viewport || p.title == "" {
			t.Errorf("%s: viewport %v, title %q: correct the templates in docs/site", name, p.viewport, p.title)
		}
		inMenu := map[string]bool{}
		for _, link := range p.menu {
			inMenu[path.Join(path.Dir(name), link)] = true
		}
		for other := range pages {
			if !inMenu[other] {
				t.Errorf("%s: the menu lacks %s: add it to pages in docs/site/hugo.toml", name, other)
			}
		}
		for _, link := range p.links {
			if filepath.Ext(link) != ".svg" {
				checkSiteLink(t, pages, name, link)
				continue
			}
			p.pictures = append(p.pictures, link)
		}
		for _, picture := range p.pictures {
			if _, err := os.Stat(filepath.Join(dir, path.Dir(name), picture)); err != nil {
				t.Errorf("%s: the picture %s is missing: correct its path, or add it to mounts in docs/site/hugo.toml", name, picture)
			}
		}
	}
}

// pageOf returns the path of a document's page.
func pageOf(document string) string {
	if document == "README.md" {
		return "index.html"
	}
	return strings.TrimSuffix(document, ".md") + ".html"
}

func checkSiteLink(t *testing.T, pages map[string]*sitePage, name, link string) {
	t.Helper()
	if file, inTree := strings.CutPrefix(link, sourceURL); inTree {
		file, _, _ = strings.Cut(file, "#")
		if _, err := os.Stat(filepath.Join(treeRoot, file)); err != nil || filepath.Ext(file) == ".md" && pages[pageOf(file)] != nil {
			t.Errorf("%s: the link to %s leads to no file, or to a file with a page on the site: correct the link in the document", name, file)
		}
		return
	}
	u, err := url.Parse(link)
	if err != nil || link == "" {
		t.Errorf("%s: link %q: %v", name, link, err)
		return
	}
	if u.Scheme != "" {
		return // of another site
	}
	target := name
	if u.Path != "" {
		target = path.Join(path.Dir(name), u.Path)
	}
	switch p := pages[target]; {
	case p == nil:
		t.Errorf("%s: the link to %s leads to no page: correct it in the document", name, link)
	case u.Fragment != "" && !p.ids[u.Fragment]:
		t.Errorf("%s: the link to %s leads to a heading that does not exist: correct it in the document", name, link)
	}
}
