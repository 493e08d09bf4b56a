// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// buildOptions contains the parameters of the command `build`.
type buildOptions struct {
	root, ldflags     string // the source; the flags of Go's linker
	version, revision string
	at                time.Time // the time of all files and of the image
}

// rootPrograms are in the root folder of the image. All others below plugins/ are in its folder /plugins, for the runtime's folder of
// plugins.
func rootPrograms() []string { return []string{"podlace", "podlace-node", "sriov-device-plugin"} }

func platforms() []v1.Platform {
	return []v1.Platform{{OS: "linux", Architecture: "amd64"}, {OS: "linux", Architecture: "arm64"}}
}

// runBuild builds Podlace's image.
func runBuild(args []string) error {
	var o buildOptions
	flags := newFlags("build")
	flags.StringVar(&o.root, "root", "../..", "folder of the source")
	flags.StringVar(&o.ldflags, "ldflags", "-s -w", "flags for Go's linker")
	flags.StringVar(&o.version, "version", "unknown", "version, for the labels")
	flags.StringVar(&o.revision, "revision", "unknown", "commit, for the labels")
	epoch := flags.Int64("epoch", 0, "time of all files, in seconds since 1970")
	image := flags.String("name", "", "name of the image, REGISTRY/NAME:TAG")
	out := flags.String("out", "", "folder for image/ and image.tar")
	push := flags.Bool("push", false, "push the image to the registry of its name")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *out == "" || flags.NArg() > 0 {
		return errors.New("build: -out is required, and there are no arguments")
	}
	o.at = time.Unix(*epoch, 0).UTC()
	tag, err := imageName(*image)
	if err != nil {
		return err
	}
	index, err := buildIndex(o)
	if err != nil {
		return err
	}
	if err := saveImage(*out, index, tag, o.at); err != nil {
		return err
	}
	if *push {
		if err := pushIndex(tag, index); err != nil {
			return err
		}
	}
	return printReport(*out, index, tag, *push)
}

// buildIndex returns an index with one image for each platform.
func buildIndex(o buildOptions) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range platforms() {
		img, err := buildImage(o, p)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &p}})
	}
	return index, nil
}

func buildImage(o buildOptions, p v1.Platform) (v1.Image, error) {
	folder, err := os.MkdirTemp("", "podlace-image-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	programs, err := compilePrograms(o, p, folder)
	if err != nil {
		return nil, err
	}
	entries := []imageEntry{{path: "/LICENSE", kind: tar.TypeReg, from: filepath.Join(o.root, "LICENSE"), mode: 0o644}}
	for _, program := range programs {
		e := imageEntry{path: "/plugins/" + program, kind: tar.TypeReg, from: filepath.Join(folder, program), mode: 0o755}
		if slices.Contains(rootPrograms(), program) {
			e.path = "/" + program
		}
		entries = append(entries, e)
	}
	layer, err := newLayer(entries, o.at)
	if err != nil {
		return nil, err
	}
	return newImage(p, v1.Config{Entrypoint: []string{"/podlace-node"}, Cmd: []string{"run"}, Labels: imageLabels(o)}, layer, o.at)
}

// imageLabels returns the labels of the OCI image specification.
func imageLabels(o buildOptions) map[string]string {
	const key = "org.opencontainers.image."
	return map[string]string{
		key + "title":       "podlace",
		key + "description": "CNI plugins, and the agent that makes them the network of a cluster",
		key + "source":      "https://github.com/podlace/podlace",
		key + "licenses":    "Apache-2.0",
		key + "version":     o.version,
		key + "revision":    o.revision,
		key + "created":     o.at.Format(time.RFC3339),
	}
}

// compilePrograms builds all programs for a platform into a folder and returns their names. Their bytes depend only on the source.
func compilePrograms(o buildOptions, p v1.Platform, folder string) (programs []string, err error) {
	files, err := filepath.Glob(filepath.Join(o.root, "plugins/*/main.go"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s is not the folder of the source: it has no plugins/*/main.go", o.root)
	}
	args := []string{"build", "-trimpath", "-buildvcs=false", "-tags=grpcnotrace", "-ldflags", o.ldflags, "-o", folder + "/"}
	for _, f := range files {
		program := filepath.Base(filepath.Dir(f))
		programs = append(programs, program)
		args = append(args, "./plugins/"+program)
	}
	build := exec.Command("go", args...)
	build.Dir, build.Stderr = o.root, os.Stderr
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOOS="+p.OS, "GOARCH="+p.Architecture, "GOAMD64=v1", "GOARM64=v8.0")
	if err := build.Run(); err != nil {
		return nil, fmt.Errorf("go build: %w", err)
	}
	return programs, nil
}

// saveImage writes the OCI layout image/ and the archive image.tar into a folder, and replaces an older layout.
func saveImage(out string, index v1.ImageIndex, tag name.Tag, at time.Time) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	fresh, err := os.MkdirTemp(out, ".image-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(fresh)
	if err := os.Chmod(fresh, 0o755); err != nil {
		return err
	}
	if err := saveLayout(fresh, index, []name.Tag{tag}); err != nil {
		return err
	}
	if err := saveArchive(fresh, filepath.Join(out, "image.tar"), at); err != nil {
		return err
	}
	layout := filepath.Join(out, "image")
	if err := os.RemoveAll(layout); err != nil {
		return err
	}
	return os.Rename(fresh, layout)
}

// pushIndex pushes an index and its images with the credentials of `docker login` or `podman login`.
func pushIndex(tag name.Tag, index v1.ImageIndex) error {
	return pushError(tag, remote.WriteIndex(tag, index, remote.WithAuthFromKeychain(authn.DefaultKeychain)))
}

// pushError adds the image's name to the error of a push, and a hint if the registry refused the credentials.
func pushError(tag name.Tag, err error) error {
	if err == nil {
		return nil
	}
	var refused *transport.Error
	if errors.As(err, &refused) && (refused.StatusCode == 401 || refused.StatusCode == 403) {
		host := tag.RegistryStr()
		return fmt.Errorf("registry %s refused the push of %s; log in with `docker login %s` as a user who may push there: %w", host, tag, host, err)
	}
	return fmt.Errorf("push of %s: %w", tag, err)
}

// printReport prints the name and the digest of the image. A manifest should refer to the image by this digest.
func printReport(out string, index v1.ImageIndex, tag name.Tag, pushed bool) error {
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	var sizes []string
	for _, m := range manifest.Manifests {
		img, err := index.Image(m.Digest)
		if err != nil {
			return err
		}
		layers, err := img.Manifest()
		if err != nil {
			return err
		}
		sizes = append(sizes, fmt.Sprintf("%s %.1f MB", m.Platform, float64(layers.Layers[0].Size)/1e6))
	}
	fmt.Printf("%s\n  %s\n", tag, strings.Join(sizes, ", "))
	fmt.Printf("  %s (OCI layout), %s\n", filepath.Join(out, "image"), filepath.Join(out, "image.tar"))
	fmt.Printf("  %s\n", digest)
	if pushed {
		fmt.Printf("  pushed; next: make manifest IMAGE=%s@%s > podlace.yaml\n", tag.Context(), digest)
		return nil
	}
	fmt.Printf("  next, on each node: ctr -n k8s.io images import image.tar\n  then: make manifest IMAGE=%s > podlace.yaml\n", tag)
	return nil
}
