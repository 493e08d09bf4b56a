// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"sigs.k8s.io/yaml"
)

// Helm's media types for a chart in a registry.
const (
	chartConfigType  types.MediaType = "application/vnd.cncf.helm.config.v1+json"
	chartContentType types.MediaType = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// runChart writes the Helm chart as an archive and as an OCI layout, and pushes the chart to a registry.
func runChart(args []string) error {
	flags := newFlags("chart")
	image := flags.String("image", "", "default image of the chart, REGISTRY/NAME@sha256:DIGEST or REGISTRY/NAME:TAG")
	conf := flags.String("conf", "../../conf/cluster", "folder of the base, the components and the chart")
	version := flags.String("version", "unknown", "version of Podlace")
	epoch := flags.Int64("epoch", 0, "time of all files, in seconds since 1970")
	out := flags.String("out", "", "folder for podlace-VERSION.tgz and chart/")
	push := flags.String("push", "", "push the chart to REGISTRY/FOLDER/podlace:VERSION; the value is REGISTRY/FOLDER")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *out == "" || flags.NArg() > 0 {
		return errors.New("chart: -out is required, and there are no arguments")
	}
	number := chartVersion(*version)
	files, err := newChart(*conf, *image, number, *version)
	if err != nil {
		return err
	}
	archive, err := files.archive(time.Unix(*epoch, 0).UTC())
	if err != nil {
		return err
	}
	repository := "localhost/podlace"
	if *push != "" {
		repository = strings.TrimPrefix(strings.TrimSuffix(*push, "/"), "oci://") + "/podlace"
	}
	tag, err := imageName(repository + ":" + number)
	if err != nil {
		return err
	}
	return publishChart(*out, files, archive, tag, *push != "")
}

// publishChart writes the archive and the OCI layout into a folder, pushes the chart if requested, and prints its `helm install`.
func publishChart(out string, files chartFiles, archive []byte, tag name.Tag, push bool) error {
	artefact, err := chartArtefact(files["Chart.yaml"], archive)
	if err != nil {
		return err
	}
	layout, file := filepath.Join(out, "chart"), filepath.Join(out, "podlace-"+tag.TagStr()+".tgz")
	if err := os.RemoveAll(layout); err != nil {
		return err
	}
	if err := saveLayout(layout, artefact, []name.Tag{tag}); err != nil {
		return err
	}
	if err := os.WriteFile(file, archive, 0o644); err != nil {
		return err
	}
	from := file
	if push {
		if err := pushError(tag, remote.Write(tag, artefact, remote.WithAuthFromKeychain(authn.DefaultKeychain))); err != nil {
			return err
		}
		from = "oci://" + tag.Context().Name() + " --version " + tag.TagStr()
	}
	digest, err := artefact.Digest()
	if err != nil {
		return err
	}
	fmt.Printf("%s\n  %s (OCI layout)\n  %s\n", file, layout, digest)
	fmt.Printf("  next: helm install podlace %s --namespace podlace --create-namespace\n", from)
	return nil
}

// chartVersion returns three numbers, such as 1.2.3, because Helm accepts nothing else. A commit without a tag has 0.0.0-gHASH.
func chartVersion(version string) string {
	number := strings.TrimPrefix(version, "v")
	if regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$`).MatchString(number) {
		return number
	}
	return "0.0.0-g" + regexp.MustCompile(`[^0-9A-Za-z-]`).ReplaceAllString(version, "-")
}

// archive returns the chart as a compressed tar archive, whose bytes depend only on the files and the time.
func (c chartFiles) archive(at time.Time) ([]byte, error) {
	folder, err := os.MkdirTemp("", "podlace-chart-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	var entries []imageEntry
	for file, text := range c {
		from := filepath.Join(folder, strings.ReplaceAll(file, "/", "_"))
		if err := os.WriteFile(from, []byte(text), 0o600); err != nil {
			return nil, err
		}
		entries = append(entries, imageEntry{path: "/podlace/" + file, kind: tar.TypeReg, from: from, mode: 0o644})
	}
	layer, err := newLayer(entries, at)
	if err != nil {
		return nil, err
	}
	packed, err := layer.Compressed()
	if err != nil {
		return nil, err
	}
	defer packed.Close()
	return io.ReadAll(packed)
}

// packedArtefact is a Helm chart as an OCI image, whose config is Chart.yaml and whose only layer is the archive.
type packedArtefact struct {
	config, manifest []byte
	layer            v1.Layer
}

func (a packedArtefact) RawConfigFile() ([]byte, error)      { return a.config, nil }
func (a packedArtefact) RawManifest() ([]byte, error)        { return a.manifest, nil }
func (a packedArtefact) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }
func (a packedArtefact) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	if digest, err := a.layer.Digest(); err != nil || digest != h {
		return nil, fmt.Errorf("no layer %s in the chart", h)
	}
	return a.layer, nil
}

func chartArtefact(metadata string, archive []byte) (v1.Image, error) {
	a := packedArtefact{layer: static.NewLayer(archive, chartContentType)}
	var err error
	if a.config, err = yaml.YAMLToJSON([]byte(metadata)); err != nil {
		return nil, err
	}
	config, size, err := v1.SHA256(bytes.NewReader(a.config))
	if err != nil {
		return nil, err
	}
	content, err := partial.Descriptor(a.layer)
	if err != nil {
		return nil, err
	}
	a.manifest, err = json.Marshal(v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: v1.Descriptor{MediaType: chartConfigType, Size: size, Digest: config}, Layers: []v1.Descriptor{*content}})
	if err != nil {
		return nil, err
	}
	return partial.CompressedToImage(a)
}
