// SPDX-License-Identifier: Apache-2.0

package node

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// Image is the only image on the node, with nothing but busybox.
const Image = "podlace.test/busybox:1"

const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// idleCommand is the command of a sandbox's container, which waits for SIGTERM or SIGINT.
var idleCommand = []string{"/bin/sh", "-c", `trap "exit 0" TERM INT; while :; do sleep 3600 & wait $!; done`}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// imageArchive writes an OCI image layout as one tar file.
type imageArchive struct {
	tar *tar.Writer
}

// writeImage writes the busybox image of all sandboxes and containers.
func writeImage(path, busybox string) error {
	layer, err := busyboxLayer(busybox)
	if err != nil {
		return err
	}
	return writeArchive(path, Image, map[string]any{"Entrypoint": idleCommand, "Env": []string{"PATH=/bin"}}, layer)
}

// WriteProgram writes an image with one program in its root folder and without libraries.
func WriteProgram(path, name, program string) error {
	data, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	var layer bytes.Buffer
	t := tar.NewWriter(&layer)
	if err := writeFile(t, filepath.Base(program), data, 0o755); err != nil {
		return err
	}
	if err := t.Close(); err != nil {
		return err
	}
	return writeArchive(path, name, map[string]any{"Entrypoint": []string{"/" + filepath.Base(program)}}, layer.Bytes())
}

func writeArchive(path, name string, config map[string]any, layer []byte) error {
	var out bytes.Buffer
	a := imageArchive{tar.NewWriter(&out)}
	if err := a.image(name, config, layer); err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	if err := a.tar.Close(); err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	return os.WriteFile(path, out.Bytes(), 0o600)
}

// WriteImage writes the busybox image for `ctr images import`.
func WriteImage(path string) error {
	busybox, err := staticBusybox()
	if err != nil {
		return err
	}
	return writeImage(path, busybox)
}

func busyboxLayer(busybox string) ([]byte, error) {
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, err
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("%s --list: %w", busybox, err)
	}
	var layer bytes.Buffer
	t := tar.NewWriter(&layer)
	entries := []tar.Header{
		{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o777},
	}
	for name := range strings.FieldsSeq(string(applets)) {
		if name != "busybox" {
			entries = append(entries, tar.Header{Name: "bin/" + name, Typeflag: tar.TypeSymlink, Linkname: "busybox"})
		}
	}
	for _, h := range entries {
		if err := t.WriteHeader(&h); err != nil {
			return nil, fmt.Errorf("layer: %s: %w", h.Name, err)
		}
	}
	if err := writeFile(t, "bin/busybox", program, 0o755); err != nil {
		return nil, err
	}
	return layer.Bytes(), t.Close()
}

func writeFile(t *tar.Writer, name string, data []byte, mode int64) error {
	if err := t.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data))}); err != nil {
		return fmt.Errorf("tar: %s: %w", name, err)
	}
	_, err := t.Write(data)
	return err
}

func (a imageArchive) image(name string, settings map[string]any, layer []byte) error {
	rootfs, err := a.blob(typeLayer, layer)
	if err != nil {
		return err
	}
	config, err := a.json(typeConfig, map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       settings,
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{rootfs.Digest}},
	})
	if err != nil {
		return err
	}
	manifest, err := a.json(typeManifest, map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest, "config": config, "layers": []descriptor{rootfs},
	})
	if err != nil {
		return err
	}
	manifest.Annotations = map[string]string{"io.containerd.image.name": name,
		"org.opencontainers.image.ref.name": name[strings.LastIndex(name, ":")+1:]}
	index, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": typeIndex, "manifests": []descriptor{manifest},
	})
	if err != nil {
		return err
	}
	if err := writeFile(a.tar, "index.json", index, 0o644); err != nil {
		return err
	}
	return writeFile(a.tar, "oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

func (a imageArchive) json(mediaType string, v any) (descriptor, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return descriptor{}, err
	}
	return a.blob(mediaType, data)
}

func (a imageArchive) blob(mediaType string, data []byte) (descriptor, error) {
	sum := fmt.Sprintf("%x", sha256.Sum256(data))
	d := descriptor{MediaType: mediaType, Digest: "sha256:" + sum, Size: len(data)}
	return d, writeFile(a.tar, filepath.Join("blobs", "sha256", sum), data, 0o644)
}
