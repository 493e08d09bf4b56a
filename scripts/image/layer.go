// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"compress/gzip"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// imageEntry is one file, link or folder of an image. Each entry is owned by root.
type imageEntry struct {
	path string // in the image, absolute
	kind byte   // tar.TypeReg, tar.TypeSymlink or tar.TypeDir
	from string // of a file: its content, a path on this machine; of a link: its target
	mode int64
}

// newLayer returns a compressed layer of entries and their parent folders. Its bytes depend only on these and the given time, but not on
// their order or the files' owners and times.
func newLayer(entries []imageEntry, at time.Time) (v1.Layer, error) {
	all, err := withFolders(entries)
	if err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) {
		r, w := io.Pipe()
		go func() { w.CloseWithError(writeTar(w, all, at)) }()
		return r, nil
	}
	return tarball.LayerFromOpener(open, tarball.WithCompressionLevel(gzip.BestCompression), tarball.WithCompressedCaching,
		tarball.WithMediaType(types.OCILayer))
}

// withFolders returns entries and their parent folders, sorted by path, so that a folder precedes its content.
func withFolders(entries []imageEntry) ([]imageEntry, error) {
	all := map[string]imageEntry{}
	for _, e := range entries {
		if !path.IsAbs(e.path) || path.Clean(e.path) != e.path || e.path == "/" {
			return nil, fmt.Errorf("path %q in the image: want an absolute path without . and .., and not / itself", e.path)
		}
		if _, twice := all[e.path]; twice {
			return nil, fmt.Errorf("path %s in the image is given twice", e.path)
		}
		all[e.path] = e
	}
	for _, e := range entries {
		for dir := path.Dir(e.path); dir != "/"; dir = path.Dir(dir) {
			above, there := all[dir]
			if there && above.kind == tar.TypeReg {
				return nil, fmt.Errorf("path %s in the image: %s is a file", e.path, dir)
			}
			if !there {
				all[dir] = imageEntry{path: dir, kind: tar.TypeDir, mode: 0o755}
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b imageEntry) int { return strings.Compare(a.path, b.path) }), nil
}

func writeTar(w io.Writer, entries []imageEntry, at time.Time) error {
	out := tar.NewWriter(w)
	for _, e := range entries {
		if err := writeEntry(out, e, at); err != nil {
			return fmt.Errorf("%s in the image: %w", e.path, err)
		}
	}
	return out.Close()
}

func writeEntry(out *tar.Writer, e imageEntry, at time.Time) error {
	h := &tar.Header{Typeflag: e.kind, Name: strings.TrimPrefix(e.path, "/"), Mode: e.mode, ModTime: at}
	switch e.kind {
	case tar.TypeDir:
		h.Name += "/"
		return out.WriteHeader(h)
	case tar.TypeSymlink:
		h.Linkname = e.from
		return out.WriteHeader(h)
	}
	f, err := os.Open(e.from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	h.Size = info.Size()
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(out, f)
	return err
}
