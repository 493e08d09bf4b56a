// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"sigs.k8s.io/kustomize/api/krusty"
	kustomize "sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// placeholder is the image name in the base manifest.
const placeholder = "podlace"

// runManifest writes the manifest of a cluster.
func runManifest(args []string) error {
	var components repeatedFlag
	flags := newFlags("manifest")
	flags.Var(&components, "component", "folder of conf/cluster/components; may be repeated")
	sriovFile := flags.String("sriov-config", "", "config.json of the SR-IOV device plugin, for the components sriov and dra")
	image := flags.String("image", "", "image that the nodes can pull, REGISTRY/NAME@sha256:DIGEST or REGISTRY/NAME:TAG")
	conf := flags.String("conf", "../../conf/cluster", "folder of the base and the components")
	out := flags.String("out", "", "the file to write; without it the output")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("manifest: unexpected argument %q", flags.Arg(0))
	}
	var sriov *sriovConfig
	if *sriovFile != "" {
		var err error
		if sriov, err = readSRIOVConfig(*sriovFile); err != nil {
			return err
		}
	}
	text, err := renderManifest(*conf, *image, components, sriov)
	if err != nil {
		return err
	}
	for _, note := range []string{removalNote(components), sriov.note()} {
		if note != "" {
			fmt.Fprintln(os.Stderr, note)
		}
	}
	if *out == "" {
		_, err = os.Stdout.Write(text)
		return err
	}
	return os.WriteFile(*out, text, 0o644)
}

// parseImage parses the name of an image that nodes pull. Short names are errors, because there is no public image.
func parseImage(image string) (kustomize.Image, error) {
	to := kustomize.Image{Name: placeholder}
	if image == "" {
		return to, errors.New("which image? There is no public one yet: `make image PUSH=REGISTRY/podlace:TAG` builds and pushes one, " +
			"and prints the IMAGE= to give here")
	}
	ref, err := name.ParseReference(image, name.StrictValidation)
	if err != nil {
		return to, fmt.Errorf("image %q: want REGISTRY/NAME@sha256:DIGEST or REGISTRY/NAME:TAG: %w", image, missingPart(image, err))
	}
	to.NewName = ref.Context().Name()
	switch ref := ref.(type) {
	case name.Digest:
		to.Digest = ref.DigestStr()
	case name.Tag:
		to.NewTag = ref.TagStr()
	}
	return to, nil
}

// removalNote returns a note for a user who chose `removal` without k3s or crio: a removal needs the same one as the installation, because
// they select other folders on the node.
func removalNote(components []string) string {
	folders := func(c string) bool { return c == "k3s" || c == "crio" }
	if !slices.Contains(components, "removal") || slices.ContainsFunc(components, folders) {
		return ""
	}
	return "note: if the installation had the component k3s or crio, give it here, too: COMPONENTS='k3s removal'"
}

// missingPart returns an error that contains the missing part of an incomplete image name.
func missingPart(image string, err error) error {
	registry, rest, found := strings.Cut(image, "/")
	if !found || registry != "localhost" && !strings.ContainsAny(registry, ".:") {
		return fmt.Errorf("the registry is missing, as in docker.io/%s", image)
	}
	if _, parsed := name.ParseReference(image); parsed == nil && !strings.ContainsAny(rest, "@:") {
		return fmt.Errorf("the tag or the digest is missing, as in %s:v1", image)
	}
	return err
}

// renderManifest returns one YAML text: the base with the given image and components. The device plugin's configuration is the shipped
// example if none is given. Only the folder conf is read.
func renderManifest(conf, image string, components []string, sriov *sriovConfig) ([]byte, error) {
	to, err := parseImage(image)
	if err != nil {
		return nil, err
	}
	overlay := kustomize.Kustomization{Resources: []string{"../base"}, Images: []kustomize.Image{to}}
	known, err := componentNames(conf)
	if err != nil {
		return nil, err
	}
	if err := checkComponents(known, components); err != nil {
		return nil, err
	}
	for _, c := range inOrder(components) {
		overlay.Components = append(overlay.Components, "../components/"+c)
	}
	files := filesys.MakeFsInMemory()
	if err := loadFolder(files, conf); err != nil {
		return nil, err
	}
	if sriov != nil {
		if err := errors.Join(sriov.check(components), sriov.addTo(files, &overlay)); err != nil {
			return nil, err
		}
	}
	data, err := yaml.Marshal(overlay)
	if err != nil {
		return nil, err
	}
	if err := files.WriteFile("/overlay/kustomization.yaml", data); err != nil {
		return nil, err
	}
	options := krusty.MakeDefaultOptions()
	options.Reorder = krusty.ReorderOptionLegacy // the ConfigMap before the DaemonSet
	all, err := krusty.MakeKustomizer(options).Run(files, "/overlay")
	if err != nil {
		return nil, err
	}
	text, err := all.AsYaml()
	if err != nil {
		return nil, err
	}
	return append([]byte(header(image, components)), text...), nil
}

func header(image string, components []string) string {
	s := "# Podlace as the network of a cluster: kubectl apply -f this file. Image: " + image + ".\n"
	if len(components) > 0 {
		s += "# Components: " + strings.Join(components, ", ") + ".\n"
	}
	return s
}

// loadFolder copies a folder into a file system in memory.
func loadFolder(to filesys.FileSystem, folder string) error {
	from := os.DirFS(folder)
	return fs.WalkDir(from, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(from, path)
		if err != nil {
			return err
		}
		return to.WriteFile("/"+path, data)
	})
}
