// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// runPack creates an image for one platform from the given files.
func runPack(args []string) error {
	var names, entrypoint, cmd, env repeatedFlag
	flags := newFlags("pack")
	flags.Var(&names, "name", "name of the image, REGISTRY/NAME:TAG; may be repeated")
	flags.Var(&entrypoint, "entrypoint", "one word of the entrypoint; repeat it for each word")
	flags.Var(&cmd, "cmd", "one word of the default arguments; repeat it for each word")
	flags.Var(&env, "env", "NAME=VALUE; may be repeated")
	user := flags.String("user", "", "the user, UID[:GID]")
	dir := flags.String("workdir", "", "the working directory")
	platform := flags.String("platform", "linux/"+runtime.GOARCH, "OS/ARCH")
	out := flags.String("out", "", "the tar file to write: an OCI layout that ctr, podman and docker import")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *out == "" || len(names) == 0 {
		return errors.New("pack: -name and -out are required")
	}
	var tags []name.Tag
	for _, n := range names {
		tag, err := imageName(n)
		if err != nil {
			return err
		}
		tags = append(tags, tag)
	}
	p, err := v1.ParsePlatform(*platform)
	if err != nil {
		return fmt.Errorf("pack: -platform %q: %w", *platform, err)
	}
	entries, err := parseEntries(flags.Args())
	if err != nil {
		return err
	}
	config := v1.Config{Entrypoint: entrypoint, Cmd: cmd, Env: env, User: *user, WorkingDir: *dir}
	return packImage(*out, tags, *p, config, entries)
}

// packImage writes an image of one platform into a tar file.
func packImage(out string, tags []name.Tag, platform v1.Platform, config v1.Config, entries []imageEntry) error {
	at := time.Unix(0, 0).UTC()
	layer, err := newLayer(entries, at)
	if err != nil {
		return err
	}
	img, err := newImage(platform, config, layer, at)
	if err != nil {
		return err
	}
	folder, err := os.MkdirTemp(filepath.Dir(out), ".pack-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	if err := saveLayout(folder, img, tags); err != nil {
		return err
	}
	if err := addDocker(folder, img, tags); err != nil {
		return err
	}
	return saveArchive(folder, out, at)
}

// parseEntries parses the arguments of pack.
func parseEntries(args []string) (entries []imageEntry, err error) {
	for _, arg := range args {
		to, from, ok := strings.Cut(arg, "=")
		if !ok || from == "" {
			return nil, fmt.Errorf("argument %q: want /PATH=FILE, /PATH=FOLDER, link:/PATH=TARGET or dir:/PATH=MODE", arg)
		}
		if link, ok := strings.CutPrefix(to, "link:"); ok {
			entries = append(entries, imageEntry{path: link, kind: tar.TypeSymlink, from: from, mode: 0o777})
			continue
		}
		if dir, ok := strings.CutPrefix(to, "dir:"); ok {
			mode, err := strconv.ParseInt(from, 8, 16)
			if err != nil || mode < 0 || mode > 0o7777 {
				return nil, fmt.Errorf("argument %q: mode %q is not octal, such as 1777", arg, from)
			}
			entries = append(entries, imageEntry{path: dir, kind: tar.TypeDir, mode: mode})
			continue
		}
		tree, err := readTree(to, from)
		if err != nil {
			return nil, fmt.Errorf("argument %q: %w", arg, err)
		}
		entries = append(entries, tree...)
	}
	return entries, nil
}

// readTree returns the entry of a file, or those of all files and links below a folder. It follows a path that is a symbolic link.
func readTree(to, from string) (entries []imageEntry, err error) {
	from, err = filepath.EvalSymlinks(from)
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		e, err := readEntry(path.Join(to, filepath.ToSlash(rel)), p, d)
		if err == nil && e.path != "/" {
			entries = append(entries, e)
		}
		return err
	})
	return entries, err
}

func readEntry(to, from string, d fs.DirEntry) (imageEntry, error) {
	info, err := d.Info()
	if err != nil {
		return imageEntry{}, err
	}
	switch {
	case d.IsDir():
		return imageEntry{path: to, kind: tar.TypeDir, mode: 0o755}, nil
	case info.Mode().Type() == fs.ModeSymlink:
		target, err := os.Readlink(from)
		return imageEntry{path: to, kind: tar.TypeSymlink, from: target, mode: 0o777}, err
	case !info.Mode().IsRegular():
		return imageEntry{}, fmt.Errorf("%s is neither a file, a link nor a folder", from)
	}
	mode := int64(0o644)
	if info.Mode()&0o111 != 0 {
		mode = 0o755
	}
	return imageEntry{path: to, kind: tar.TypeReg, from: from, mode: mode}, nil
}
