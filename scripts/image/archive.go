// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// newImage returns an image of one layer.
func newImage(platform v1.Platform, config v1.Config, layer v1.Layer, at time.Time) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Variant = platform.OS, platform.Architecture, platform.Variant
	file.Created, file.Config = v1.Time{Time: at}, config
	return mutate.ConfigFile(img, file)
}

// imageName parses the name of an image. Short names are errors, because containerd and the kubelet compare complete ones.
func imageName(s string) (name.Tag, error) {
	tag, err := name.NewTag(s, name.StrictValidation)
	if err != nil {
		return tag, fmt.Errorf("image name %q: want REGISTRY/NAME:TAG: %w", s, err)
	}
	return tag, nil
}

// imageAnnotations returns annotations with the name that containerd and podman give to an imported image.
func imageAnnotations(tag name.Tag) map[string]string {
	return map[string]string{"io.containerd.image.name": tag.Name(), "org.opencontainers.image.ref.name": tag.TagStr()}
}

// saveLayout writes an OCI layout into a new folder, in which each tag refers to the image or index.
func saveLayout(folder string, what mutate.Appendable, tags []name.Tag) error {
	to, err := layout.Write(folder, empty.Index)
	if err != nil {
		return err
	}
	for _, tag := range tags {
		named := layout.WithAnnotations(imageAnnotations(tag))
		switch what := what.(type) {
		case v1.ImageIndex:
			err = to.AppendIndex(what, named)
		case v1.Image:
			err = to.AppendImage(what, named)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// dockerEntry is an element of manifest.json, which docker reads if it does not use containerd's image store.
type dockerEntry struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// addDocker adds manifest.json, docker's list of images, to a layout. It can contain only one platform of an image.
func addDocker(folder string, img v1.Image, tags []name.Tag) error {
	manifest, err := img.Manifest()
	if err != nil {
		return err
	}
	blob := func(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }
	e := dockerEntry{Config: blob(manifest.Config.Digest)}
	for _, tag := range tags {
		e.RepoTags = append(e.RepoTags, tag.Name())
	}
	for _, l := range manifest.Layers {
		e.Layers = append(e.Layers, blob(l.Digest))
	}
	data, err := json.Marshal([]dockerEntry{e})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "manifest.json"), data, 0o644)
}

// saveArchive writes a folder into a tar file, whose bytes depend only on the names and contents of the files.
func saveArchive(folder, file string, at time.Time) error {
	var entries []imageEntry
	err := filepath.WalkDir(folder, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(folder, p)
		entries = append(entries, imageEntry{path: "/" + rel, kind: tar.TypeReg, from: p, mode: 0o644})
		return err
	})
	if err != nil {
		return err
	}
	all, err := withFolders(entries)
	if err != nil {
		return err
	}
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	if err := writeTar(out, all, at); err != nil {
		_ = out.Close()
		return err
	}
	return out.Close()
}
